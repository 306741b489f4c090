"""Train as a job of a Ray cluster, with the current folder sent along; the cluster's token is never typed.

usage: RAY_AUTH_TOKEN_PATH=FILE python examples/submit_job.py http://127.0.0.1:8265 [recipe.yaml] [key=value ...]
"""

import sys

from hocket.run.submit import submit

if __name__ == "__main__":
    address, *words = sys.argv[1:]
    command = ["hocket", "train", *words, "ray.address=auto"]
    sys.exit(submit(command, address=address, working_dir="."))
