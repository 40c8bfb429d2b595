"""What all engines share: how a version is driven, taken, proved and shown. No module here imports an engine when it is loaded."""
