"""What the gateway keeps of its last 15 minutes for the live page, in bounded memory and at no cost to requests."""
