"""What torch sees: function, layer, operators, autograd, transforms."""
