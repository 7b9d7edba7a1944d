"""WebShop: find a product that fits an instruction and buy it with the right options."""
