"""Workloads to replay: the lengths, arrival times and prompts of requests."""

from bullet_graph.workloads.load import load_workload
from bullet_graph.workloads.workload import Arrivals, Workload, WorkloadRequest, make_prompt_token_ids

__all__ = ["Arrivals", "Workload", "WorkloadRequest", "load_workload", "make_prompt_token_ids"]
