"""Tests that need an NVIDIA GPU: not even imported where there is none (`make gpu-test` says so)."""

import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]
