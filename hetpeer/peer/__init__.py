"""The command line, the daemons, and everything that a person sees."""
