"""`python -m ascend_suite` is the command `ascend-suite`."""

from ascend_suite.cli import main

if __name__ == "__main__":
    main()
