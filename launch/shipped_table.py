"""The table of docs/compile_table.md."""
