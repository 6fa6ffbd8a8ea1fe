"""Results of a load: figures, tables and sentences, the live view of a run, and files."""
