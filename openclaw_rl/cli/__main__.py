"""`python -m openclaw_rl.cli`: the same as `openclaw-rl`."""

import sys

from openclaw_rl.cli import main

if __name__ == "__main__":
    sys.exit(main())
