"""The interface to torch: functions, layers, operators."""
