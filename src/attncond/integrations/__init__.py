"""Callbacks for training loops of other libraries, each in a module that needs its library."""
