"""python tools/build_sdist.py FOLDER: builds the source distribution there, through the project's own build backend."""

import pathlib
import sys

import build_backend


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    folder = pathlib.Path(arguments[0])
    folder.mkdir(parents=True, exist_ok=True)
    print(folder / build_backend.build_sdist(str(folder)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
