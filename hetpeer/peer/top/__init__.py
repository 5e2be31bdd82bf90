"""`hetpeer top`: live view of a volunteer's daemon on a terminal; needs the extra `hetpeer[top]`
(docs/machine.md).
"""
