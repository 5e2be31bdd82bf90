"""Direct TLS streams between peers whose ports can be reached."""
