"""One process of the experiment: python -m bench.graph_persistence.child JOB, as ``Job.to_json`` writes it."""

import os
import sys

from bench.graph_persistence import load_process, mask_process, pool_process, save_process
from bench.graph_persistence.job import Job
from bench.graph_persistence.step_log import StepLog

RUN = {
    "save": save_process.run,
    "load": load_process.run,
    "masks": mask_process.run,
    "pool": pool_process.run,
}


def main(text: str) -> None:
    """Do the job; its steps are in its file."""
    job = Job.from_json(text)
    log = StepLog(job.log)
    log.run("the process ran to its end", lambda: RUN[job.role](job, log))


if __name__ == "__main__":
    main(sys.argv[1])
    sys.stdout.flush()
    sys.stderr.flush()
    # Torch would free memory through callbacks into an interpreter that is gone.
    os._exit(0)
