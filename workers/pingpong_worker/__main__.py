"""``python -m pingpong_worker``: a worker, told what to be on its standard input."""

from pingpong_worker.main import main

if __name__ == "__main__":
    main()
