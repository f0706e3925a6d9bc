.PHONY: demo lint test

demo lint test:
	@python3 dev.py $@
