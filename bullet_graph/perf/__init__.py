"""Performance: request metrics, energy and the model of the device."""
