"""Workloads: recorded traces and synthetic ones fitted to them."""

from bullet_graph.workloads.load import load_workload
from bullet_graph.workloads.request import Workload, WorkloadRequest, make_prompt_token_ids

__all__ = ["Workload", "WorkloadRequest", "load_workload", "make_prompt_token_ids"]
