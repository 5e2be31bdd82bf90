"""The real cores in virtual time: `hetpeer simulate`, and the tests of the protocol."""
