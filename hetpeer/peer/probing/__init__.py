"""The line of a newcomer: uplink, downlink and round trips, measured before it has a place."""
