"""Commands about a swarm: bootstrap, status, plan, simulate, dashboard, demo."""
