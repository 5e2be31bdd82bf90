"""What every hetpeer process has: a home, a console, a life from start to signal."""
