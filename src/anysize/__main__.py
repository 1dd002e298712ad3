"""`python -m anysize`, which `torchrun -m anysize` needs."""

import sys

from anysize.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
