"""The console script: says what to install where the command line's libraries are missing."""

from __future__ import annotations

import sys


def main() -> None:
    """Run ``attncond``; ``python -m attncond`` is the same."""
    try:
        from attncond.cli import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich", "click"):
            raise
        print(
            f"attncond: the command line needs {error.name}, which is not installed: "
            "pip install 'attncond[cli]'",
            file=sys.stderr,
        )
        raise SystemExit(2) from None
    except KeyboardInterrupt:  # importing torch takes seconds, time enough to change one's mind
        raise SystemExit(130) from None
    app(prog_name="attncond")


if __name__ == "__main__":
    main()
