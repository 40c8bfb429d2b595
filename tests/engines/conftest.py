def pytest_configure(config):
    config.addinivalue_line("markers", "quick: one engine in process; tools/engines --quick runs these alone")
