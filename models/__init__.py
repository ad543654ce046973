"""Models to train with ntpjax. They do not import it, and work with any JAX."""
