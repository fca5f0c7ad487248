"""The face to torch: function, layer, operators, autograd, transforms."""
