"""When the import of the package began, on the clock of ``time.perf_counter``: to be imported before all else."""

import time

BEGAN_S = time.perf_counter()
