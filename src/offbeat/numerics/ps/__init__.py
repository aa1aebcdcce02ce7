"""The values of a parameter server: keys, tables, updates, filters."""
