"""Who asks, and what each may have: API keys, their tenants, and what is counted of them."""
