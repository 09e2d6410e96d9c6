"""The console script: says what to install where the command line's libraries are missing."""

from __future__ import annotations

import sys


def main() -> None:
    """Run ``attncond``; ``python -m attncond`` is the same."""
    try:
        from attncond.cli import app
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if missing not in ("typer", "rich"):
            raise
        print(
            f"attncond: the command line needs {missing}, which is not installed: "
            "pip install 'attncond[cli]'",
            file=sys.stderr,
        )
        raise SystemExit(2) from None
    except KeyboardInterrupt:  # importing torch takes seconds, time enough to change one's mind
        raise SystemExit(130) from None
    app(prog_name="attncond")


if __name__ == "__main__":
    main()
