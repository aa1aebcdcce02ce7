"""Parts of the launcher of local workers: their output, and how they ended."""
