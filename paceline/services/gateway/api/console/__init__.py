"""The web console: a page that shows the fleet and its requests, and its data."""
