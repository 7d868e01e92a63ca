import sys

from examples.demo.command import main

if __name__ == "__main__":
    sys.exit(main())
