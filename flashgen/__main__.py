"""``python -m flashgen`` is the program ``flashgen``."""

from flashgen.cli import main

if __name__ == "__main__":
    main()
