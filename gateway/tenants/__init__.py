"""Tenants: clients' API keys, the limits of each tenant, and the counts of what tenants have used."""
