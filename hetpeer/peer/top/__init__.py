"""`hetpeer top`: a volunteer's daemon live on a terminal. Loaded only where the extra `hetpeer[top]` is (docs/machine.md)."""
