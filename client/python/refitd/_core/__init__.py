"""The binding to the C library: members of a group, their calls, updates and events."""
