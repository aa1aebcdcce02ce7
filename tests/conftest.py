"""What holds of all tests."""

import signal

# Ctrl-C is ignored in a shell's background, by whatever is started there, and some tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)
