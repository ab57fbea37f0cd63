"""Other servers, installed into environments of their own and started beside ours."""
