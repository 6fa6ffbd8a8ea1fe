"""API keys of clients, the tenants behind them, the tenants' limits, and the counts of what they have used."""
