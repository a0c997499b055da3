"""`python -m lmstate`: the command `lmstate`."""

from lmstate.cli import main

if __name__ == "__main__":
    main()
