"""`python -m benchmarks`, in the repository."""

from .command import main

if __name__ == "__main__":
    main()
