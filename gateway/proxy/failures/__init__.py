"""What follows a failure: the kinds and their rules, whose fault it is, deadlines, and the actions."""
