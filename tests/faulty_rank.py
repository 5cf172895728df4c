"""A rank by torchrun: python tests/faulty_rank.py FAULT, which rank 1 has. Prints rank and error as JSON."""

import json
import os
import signal
import sys
import time

import torch

from shakespeare.attention_ext import parallel, ranks

TIMEOUT = 30.0  # seconds: the time of a test, which a machine is not too slow for
ranks.ROLL_CALL = 15.0  # torchrun kills what has not ended 30 s after its SIGTERM


def main(fault: str) -> None:
    said = ""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    try:
        with ranks.join("cpu", TIMEOUT):
            q = torch.randn(1, 2, 40 + rank, 16)
            parallel.attention("ring", q, q, q, part="part0")
            if rank == 1:
                if fault == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                elif fault == "stalls":
                    time.sleep(1000)
                elif fault == "error":
                    raise OSError("the disk of rank 1 is full")
            parallel.attention("ring", q, q, q, part="part0")
    except (ranks.LostRank, ValueError, OSError) as error:
        said = str(error)
    line = json.dumps({"rank": rank, "error": said})
    os.write(1, f"{line}\n".encode())  # one call, so that the lines of the ranks do not mix
    os._exit(2 if said else 0)


if __name__ == "__main__":
    main(sys.argv[1])
