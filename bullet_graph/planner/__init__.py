"""The planner: chooses at every tick how prefill and decode share the GPU."""
