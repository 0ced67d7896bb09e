"""The report of what was measured, made of JSON files alone: see ``bench/report.py``."""
