"""`python -m ntf_demo.fake_push`."""

import argparse
import sys

from ntf_demo.fake_push.program import add_arguments, run

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="ntf_demo.fake_push", description="A fake push service for tests.")
    add_arguments(parser)
    sys.exit(run(parser.parse_args()))
