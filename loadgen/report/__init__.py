"""What became of a load: figures, tables and sentences, the view of a run that goes on, and files."""
