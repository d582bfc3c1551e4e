"""`python -m humming_cutlass`, also installed as `humming-cutlass`."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Runs the command line and leaves with its exit code."""
    from humming_cutlass.cli import run

    raise SystemExit(run())


if __name__ == "__main__":
    main()
