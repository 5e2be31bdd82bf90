"""`hetpeer demo`: a whole run on one machine."""
