"""Parts of every hetpeer process: home, console, children, start and end."""
