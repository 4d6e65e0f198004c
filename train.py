from train.main import main

if __name__ == "__main__":
    main()
